"""What starting costs: seconds that `import twinkle` adds to a bare interpreter, and whole runs of two commands.

The programs run in turn, so that a slow moment of the machine meets all of them; medians are printed as one JSON object.

    python benchmarks/startup.py [--repeats 21]
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import at_most, report

TWINKLE = str(Path(sys.executable).with_name("twinkle"))
PROGRAMS = {
    "bare": [sys.executable, "-c", "pass"],
    "import_twinkle": [sys.executable, "-c", "import twinkle"],
    "help": [TWINKLE, "--help"],
    "plugins": [TWINKLE, "plugins"],
}


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(repeats: int) -> dict[str, dict]:
    for command in PROGRAMS.values():  # bytecode is written and files are read into memory once
        seconds(command)
    rounds = [{name: seconds(command) for name, command in PROGRAMS.items()} for _ in range(repeats)]
    return {
        "import_twinkle_added_s": at_most(0.10, [one["import_twinkle"] - one["bare"] for one in rounds], name="median_s"),
        "twinkle_help_s": at_most(0.35, [one["help"] for one in rounds], name="median_s"),
        "twinkle_plugins_s": at_most(0.35, [one["plugins"] for one in rounds], name="median_s"),
        "medians_s": {name: round(statistics.median(one[name] for one in rounds), 4) for name in PROGRAMS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=21)
    report("startup", **measure(parser.parse_args().repeats))


if __name__ == "__main__":
    main()
