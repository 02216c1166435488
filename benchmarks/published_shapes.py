"""Seconds and peak memory of `mgraph compile` for every published shape of the zoo, in bf16, to a train package.

    python3 -m benchmarks.published_shapes [--results FILE] [NAME ...]

Exit status 1 where a shape takes more than 60 s or 3 GB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compiling import compile_model

RESULTS = Path(__file__).parent / "results" / "published_shapes.json"
NAMES = ("llama3-8b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "gemma3-4b")
MOST_SECONDS, MOST_BYTES = 60.0, 3e9


def main() -> int:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| shape | seconds | peak GB |\n|---|--:|--:|")
    for name in options.names:
        run = compile_model(name)
        rows.append({"name": name, **asdict(run)})
        print(f"| {name} | {run.seconds:.1f} | {run.peak_bytes / 1e9:.2f} |", flush=True)
    data = {"date": datetime.date.today().isoformat(), "load_average": os.getloadavg()[0], "rows": rows}
    options.results.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return any(row["seconds"] > MOST_SECONDS or row["peak_bytes"] > MOST_BYTES for row in rows)


if __name__ == "__main__":
    sys.exit(main())
