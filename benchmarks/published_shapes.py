"""Seconds and peak memory of `mgraph compile` for every published shape of the zoo, in bf16, to a train package.

    python3 -m benchmarks.published_shapes [--results FILE] [NAME ...]

The command is timed as a person would: a process of its own, kernels included, with no kernel cached. Exit status 1
where a shape takes more than 60 s or 3 GB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "published_shapes.json"
NAMES = ("llama3-8b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "gemma3-4b")
MOST_SECONDS, MOST_BYTES = 60.0, 3e9


def measure(name: str) -> dict[str, Any]:
    """One compilation: wall seconds, peak resident bytes, and the seconds of its stages."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "package"
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{directory}/cache"}
        command = [sys.executable, "-m", "mgraph", "compile", name, "--precision", "bf16", "-o", str(package)]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        if status:
            raise SystemExit(f"mgraph compile {name} failed")
        stages = json.loads((package / "graphs" / "compilation.json").read_text())["seconds"]
    return {"name": name, "seconds": round(seconds, 1), "peak_bytes": usage.ru_maxrss * 1024, "stages": stages}


def main() -> int:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    print("| shape | seconds | peak GB |\n|---|--:|--:|")
    for name in options.names:
        rows.append(measure(name))
        print(f"| {name} | {rows[-1]['seconds']:.1f} | {rows[-1]['peak_bytes'] / 1e9:.2f} |", flush=True)
    data = {"date": datetime.date.today().isoformat(), "load_average": os.getloadavg()[0], "rows": rows}
    options.results.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return any(row["seconds"] > MOST_SECONDS or row["peak_bytes"] > MOST_BYTES for row in rows)


if __name__ == "__main__":
    sys.exit(main())
