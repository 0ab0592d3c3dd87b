"""Environments that have the packages of one extra of snnk, and no others.

The wheel is installed by pip. The packages that it requires are links to those of the present environment, so that
nothing is downloaded; so their versions are the present ones, too.
"""

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement


class Installed:
    """A new environment with the wheel alone.

    Args:
        wheel: file of snnk.
        folder: new folder for the environment.
    """

    def __init__(self, wheel, folder):
        self.folder = Path(folder)
        venv.create(self.folder, symlinks=True)
        self.bin = self.folder / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-index"]
        subprocess.run([*pip, "--disable-pip-version-check", "--no-deps", str(wheel)], check=True)
        self.site = next(self.folder.glob("lib/python*/site-packages"))

    def packages(self, extra):
        """Installed packages that snnk needs with an extra ("" for none), and that these need in turn, by name."""
        found, waiting, seen = {}, [("snnk", extra)], set()
        while waiting:
            name, extra = waiting.pop()
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            places = [str(self.site)] if name == "snnk" else sys.path
            package = next(iter(Distribution.discover(name=name, path=places)), None)
            assert package is not None, f"{name} is not installed"
            found[name] = package
            for line in package.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting += [(needed.name, part) for part in ("", *needed.extras)]
        del found["snnk"]
        return found

    def run(self, extra, *command):
        """Run a program of the environment, with the packages of an extra; returns what it printed."""
        place = self.folder / "links" / (extra or "none")
        if not place.exists():
            place.mkdir(parents=True)
            for package in self.packages(extra).values():
                for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
                    if not (place / top).exists():
                        (place / top).symlink_to(package.locate_file(top))
        known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment = {**known, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        command = [str(self.bin / command[0]), *map(str, command[1:])]
        return subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True)
