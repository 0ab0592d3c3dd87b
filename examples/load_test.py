"""Requests per second of exported models, each served by serve.py on the loopback address.

    python examples/load_test.py served-original served-small [--clients 2] [--texts 1] [--seconds 5] [--out rates.json]

Every client sends its next request when it has the answer to the last one. Clients and server share the processor.
"""

import argparse
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SENTENCE = "A man with a hat is playing the guitar in front of the old town hall."


def measure(folder: Path, clients: int, texts: int, seconds: float, warm_up: float) -> tuple[float, float]:
    """Requests per second, and the median milliseconds of one."""
    command = [sys.executable, str(Path(__file__).with_name("serve.py")), str(folder), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline().split()[-1])
            times: list[float] = []
            body = json.dumps({"texts": texts * [SENTENCE]})
            send(port, body, warm_up, [])
            began = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                for client in [pool.submit(send, port, body, seconds, times) for _ in range(clients)]:
                    client.result()  # raises the error of a client
            return len(times) / (time.perf_counter() - began), 1e3 * statistics.median(times)
        finally:
            server.terminate()


def send(port: int, body: str, seconds: float, times: list[float]) -> None:
    """Send requests one after another, and note how long each takes."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.request("POST", "/", body)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status} {answer.reason}")
        answer.read()
        times.append(time.perf_counter() - began)
    connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="exported models, the first of which is the original")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--texts", type=int, default=1, help="texts per request")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration per model")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before that")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    first, rows = None, []
    for folder in args.folders:
        rate, median = measure(folder, args.clients, args.texts, args.seconds, args.warm_up)
        first = first or rate
        print(f"{folder}: {rate:.1f} requests per second, {rate / first:.2f} times, median {median:.1f} ms")
        rows.append({"model": folder.name, "requests_per_second": rate, "times": rate / first, "median_ms": median})
    if args.out:
        settings = {name: getattr(args, name) for name in ("clients", "texts", "seconds")}
        machine = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}
        args.out.write_text(json.dumps({"settings": settings, **machine, "rows": rows}, indent=1) + "\n")
