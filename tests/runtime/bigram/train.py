"""Train this package."""

from pathlib import Path

from mgraph.runtime.start import main

main(Path(__file__).parent)
