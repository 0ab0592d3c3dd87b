"""Latency: which rounds are run and by which clock. Times are made up, so that no test depends on a machine."""

import math
from collections import Counter
from functools import partial

import pytest
import torch

from snnk import _environment
from snnk.hf.serve import latency
from snnk.hf.serve.latency import Latency, measure, watch


@pytest.fixture
def clock(monkeypatch):
    """Both clocks, which stand still until a run moves them, on a machine where no thread waits."""
    now = {"perf_counter": 0.0, "process_time": 0.0}
    monkeypatch.setattr(latency, "_waiting", lambda: {"1": 0.0})
    for name in now:
        monkeypatch.setattr(latency.time, name, lambda name=name: now[name])
    return now


def runs_of(clock, **spent):
    """Runs that take the next of their seconds, (wall, processor), each time; the last for ever."""
    calls = []

    def make(name, times):
        left = list(times)

        def run():
            calls.append((name, torch.get_num_threads()))
            wall, processor = left.pop(0) if len(left) > 1 else left[0]
            clock["perf_counter"] += wall
            clock["process_time"] += processor

        return run

    return {name: make(name, times) for name, times in spent.items()}, calls


def test_seconds_and_ratios_are_one_measurement():
    """Medians of 2 and 3 s, where one is as often faster as slower: the seconds show that the two are equal."""
    found = Latency("x", "wall", 1, 0.0, {"wall": {"a": [2.0, 9.0, 1.0], "b": [6.0, 3.0, 1.0]}})
    assert found.seconds == {"a": 2.0, "b": 2.0} and found.rounds == 3


def test_runs_take_turns_in_being_first_on_the_threads_that_were_asked_for(clock):
    runs, calls = runs_of(clock, a=[*3 * [(9, 9)], (2, 1)], b=[*3 * [(9, 9)], (4, 3)], c=[(1, 1)])
    before = torch.get_num_threads()
    found = measure(runs, "1 x 8 tokens", threads=before + 1, most=3, spread=-1)
    assert "".join(name for name, _ in calls) == "aaabbbccc" + "bcacababc" and {used for _, used in calls} == {
        before + 1
    }
    assert found.threads == before + 1 and torch.get_num_threads() == before
    assert found.seconds_by("processor") == {"a": 1, "b": 3, "c": 1}  # the first three calls warm up
    assert found.seconds_by("wall") == {"a": 2, "b": 4, "c": 1}


@pytest.mark.parametrize(
    ("threads", "asked", "wanted"), [(1, None, "processor"), (2, None, "wall"), (1, "wall", "wall")]
)
def test_processor_time_decides_for_one_thread_alone(clock, threads, asked, wanted):
    """Threads that wait for each other count as processor time, and an accelerator does not."""
    runs, _ = runs_of(clock, a=[(2, 1)], b=[(8, 2)])
    found = measure(runs, "x", threads=threads, clock=asked, most=3)
    assert found.clock == wanted and found.seconds == found.seconds_by(wanted)
    assert found.seconds["b"] / found.seconds["a"] == (2 if wanted == "processor" else 4)


def test_rounds_end_when_times_are_steady_or_at_a_limit(clock):
    steady, _ = runs_of(clock, a=[(1, 1)])
    assert measure(steady, "x", threads=1).rounds == 3
    wild = [*3 * [(1, 1)], *[(1, 1 + i % 2) for i in range(200)]]
    assert measure(runs_of(clock, a=wild)[0], "x", threads=1, seconds=1e9).rounds == latency.ROUNDS
    assert measure(runs_of(clock, a=wild)[0], "x", threads=1, seconds=11.5).rounds == 9
    late = measure(runs_of(clock, a=wild[:22])[0], "x", threads=1, seconds=1e9, spread=0.005)
    assert 20 < late.rounds < latency.ROUNDS and late.spread["a"] <= 0.005


def test_a_turn_of_a_short_run_has_several_calls_after_one_that_is_not_counted(clock):
    """Times are binary fractions, which are added without rounding. A turn of `a` has a slow first call."""
    short = 2.0**-8
    turn = math.ceil(latency.TURN / short)
    slow = [(1, 1), (1, 1), (short, short), *3 * [(1, 1), *turn * [(short, short)]]]
    runs, calls = runs_of(clock, a=slow, b=[(1, 1)])
    found = measure(runs, "x", threads=1, most=3, spread=-1)
    assert found.times["wall"] == found.times["processor"] == {"a": 3 * [short], "b": 3 * [1.0]}
    assert Counter(name for name, _ in calls) == {"a": 3 + 3 * (1 + turn), "b": 3 + 3}


@pytest.mark.parametrize("seconds", [2.0**-7, 2.0**-6, 2.0**-5, 2.0**-3])
def test_the_ratio_of_two_runs_does_not_depend_on_their_length(clock, seconds):
    """The first call after another run takes half as long again; below, at and above the shortest turn."""
    last = []

    def run(name, times):
        cold = 1.5 if last != [name] else 1.0
        last[:] = [name]
        for key in clock:
            clock[key] += cold * times * seconds

    found = measure({"a": partial(run, "a", 1.0), "b": partial(run, "b", 1.25)}, "x", threads=1, most=5, spread=-1)
    assert found.seconds["b"] / found.seconds["a"] == pytest.approx(1.25)


def test_spread_is_the_standard_error_of_the_median():
    """Over many draws of normal times, within a quarter: the constant 0.93 holds for many rounds."""
    draws = 1 + 0.02 * torch.randn(400, 51, generator=torch.Generator().manual_seed(0)).double()
    spreads = [Latency("x", "wall", 1, 0, {"wall": {"a": row.tolist()}}).spread["a"] for row in draws]
    exact = float(draws.quantile(0.5, dim=1).std())
    assert sum(spreads) / len(spreads) == pytest.approx(exact, rel=0.25)


def test_doubts_name_a_busy_machine_and_unsteady_times():
    quiet = Latency("x", "wall", 1, 0.1, {"wall": {"a": [1.0, 1.0, 1.0]}})
    assert quiet.doubts() == []
    found = Latency("x", "wall", 2, 0.5, {"wall": {"a": [1.0, 2.0, 1.0, 2.0]}}).doubts()
    assert "waited for 50 %" in found[0] and "measure again when it is idle" in found[0]
    assert found[1].startswith("times are known within 31.0 % (standard error) and not within 1.0 %")
    assert "does not count the waiting" in Latency("x", "wall", 1, 0.5, {"wall": {"a": [1.0, 1.0]}}).doubts()[0]


def test_the_record_names_batch_clocks_threads_and_machine(clock):
    found = measure(runs_of(clock, a=[(2, 1)], b=[(4, 3)])[0], "32 x 128 tokens", threads=1).to_dict()
    assert found["runs"]["b"] == {"wall_seconds": 4.0, "processor_seconds": 3.0, "spread": 0.0}
    assert (found["inputs"], found["threads"], found["rounds"], found["waited"]) == ("32 x 128 tokens", 1, 3, 0.0)
    assert found["processor"] and found["instructions"] == _environment.instructions()


@pytest.mark.parametrize("threads", [1, 2])
def test_waiting_is_that_of_the_thread_that_waited_longest(monkeypatch, threads):
    """Two threads at work take up to two seconds of processor time per second, so that this shows no waiting."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for waits, wanted in (([{"1": 1.0}, {"1": 2.0, "2": 4.0}], 0.4), ([{}, {}], 0.1 if threads == 1 else 0.0)):
        clocks = {"perf_counter": iter([0.0, 10.0]), "process_time": iter([0.0, 9.0 * threads])}
        for name, times in clocks.items():
            monkeypatch.setattr(latency.time, name, partial(next, times))
        monkeypatch.setattr(latency, "_waiting", partial(next, iter(waits)))
        with watch() as watched:
            pass
        assert watched.waited == pytest.approx(wanted)


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="there is nothing to measure; give at least one run"):
        measure({}, "x")


def test_instruction_sets_come_from_the_system_or_are_unknown(monkeypatch, tmp_path):
    def read(text):
        if text is not None:
            (tmp_path / "cpuinfo").write_text(text)

        def opened(path, **_):
            if text is None:
                raise OSError(path)
            return (tmp_path / "cpuinfo").open()

        monkeypatch.setattr(_environment, "open", opened, raising=False)
        return _environment.instructions()

    assert read("model name: x\nflags : fpu avx2 avx512f avx512_vnni amx_tile avx512_bf16\n") == (
        "AVX2, AVX-512, VNNI, AMX, bf16"
    )
    assert (
        read("flags : fpu avx2 avx_vnni\n") == "AVX2, VNNI" and read("Features : fp asimd i8mm bf16\n") == "bf16, i8mm"
    )
    assert read("flags : fpu\n") == "none"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_vnni": False, "cpu_name": "x"})
    assert read(None) == "AVX2"
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert read(None) == "unknown"
