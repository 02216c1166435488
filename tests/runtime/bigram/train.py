"""Train this package."""

from pathlib import Path

from mgraph.runtime.train import main

main(Path(__file__).parent)
