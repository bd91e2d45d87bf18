"""What starting costs: seconds that `import twinkle` adds to a bare interpreter, and whole runs of two commands.

The programs run in turn, so that a slow moment of the machine meets all of them; medians are printed as one JSON object.

    python benchmarks/startup.py [--repeats 21]
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def measure(repeats: int) -> dict[str, float]:
    for command in PROGRAMS.values():  # bytecode is written and files are read into memory once
        seconds(command)
    rounds = [{name: seconds(command) for name, command in PROGRAMS.items()} for _ in range(repeats)]
    return {
        "import_twinkle_added_s": statistics.median(one["import_twinkle"] - one["bare"] for one in rounds),
        "twinkle_help_s": statistics.median(one["help"] for one in rounds),
        "twinkle_plugins_s": statistics.median(one["plugins"] for one in rounds),
        "bare_interpreter_s": statistics.median(one["bare"] for one in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=21)
    figures = measure(parser.parse_args().repeats)
    print(json.dumps({"benchmark": "startup", **{name: round(value, 4) for name, value in figures.items()},
                      "limits": {"import_twinkle_added_s": 0.10, "twinkle_help_s": 0.35, "twinkle_plugins_s": 0.35},
                      "python": platform.python_version()}))


if __name__ == "__main__":
    main()
