"""``make bench``: every measured promise, as ratios where the speed of a machine matters. Status 1: one is broken."""

import argparse
import logging
import sys
import warnings

import lightning.pytorch  # noqa: F401  it sets its loggers' levels at import, which must not come after ours

from tests.benchmarks import block, commands, decoder, dino, geometry, index, probe, streaming, training

SUITES = {
    "block": block.results,
    "decoder": decoder.results,
    "dino": dino.results,
    "geometry": geometry.results,
    "probe": probe.results,
    "fit": training.results,
    "streaming": streaming.results,
    "index": index.results,
    "commands": commands.results,
}


def main() -> int:
    """Runs the suites named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of {', '.join(SUITES)}; all by default")
    names = parser.parse_args().suites or list(SUITES)
    if unknown := set(names) - set(SUITES):
        parser.error(f"unknown suites {sorted(unknown)}; expected {', '.join(SUITES)}")
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    broken = 0
    print(f"{'measured':>9}  {'bound':>8}  ")
    for name in names:
        for r in SUITES[name]():
            broken += not r.holds
            sign = "<=" if r.at_most else ">="
            print(f"{r.value:9.3f}  {sign} {r.bound:5.2f}  {'ok    ' if r.holds else 'BROKEN'}  {r.name} ({r.detail})")
            sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
