"""The installed size of each extra, as docs/start.md shows it: `python tools/extras.py`.

The size of an extra is that of the files of all packages that it requires, directly or not, without those that snnk
requires anyway. Packages that two extras share count in both, so that the sizes of several extras do not add
up. The packages must be installed, as `make` does. With names of extras, the last line has their size together:

    python tools/extras.py cli serve peft sklearn
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, metadata

from packaging.requirements import Requirement


def packages(*extras: str) -> dict[str, Distribution]:
    """Installed packages by name that snnk requires with these extras, and that these require in turn."""
    found: dict[str, Distribution] = {}
    waiting, seen = [("snnk", extra) for extra in ("", *extras)], set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed, so that nothing can be measured: pip install {name}") from None
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name.lower().replace("_", "-"), part) for part in ("", *needed.extras)]
    del found["snnk"]
    return found


def size(found: dict[str, Distribution]) -> int:
    """The bytes of the files of packages, with what Python compiles of them when they are installed."""
    places = {str(file.locate()): file for package in found.values() for file in package.files or ()}
    return sum(file.locate().stat().st_size for file in places.values() if file.locate().is_file())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(extras: list[str]) -> None:
    known = [name for name in metadata("snnk").get_all("Provides-Extra") or () if name != "dev"]
    if unknown := [name for name in extras if name not in known]:
        raise SystemExit(f"snnk has no extra {', '.join(unknown)}; it has {', '.join(known)}")
    own = packages()
    torch = size({"torch": distribution("torch")})
    say(f"{'snnk without extras':34}{size(own) / 1e6:8,.0f} MB, of which torch {torch / 1e6:,.0f} MB")
    for extra in known:
        added = {name: package for name, package in packages(extra).items() if name not in own}
        say(f"{extra:34}{size(added) / 1e6:8,.0f} MB more, {len(added)} packages")
    if extras:
        say(f"{'with ' + ', '.join(extras):34}{size(packages(*extras)) / 1e6:8,.0f} MB in all")


if __name__ == "__main__":
    main(sys.argv[1:])
