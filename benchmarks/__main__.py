"""`python -m benchmarks VERB`: one verb for each way to measure."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import bytes as bytes_moved
from benchmarks import cpu, gpu

VERBS = {"bytes": bytes_moved, "cpu": cpu, "gpu": gpu}


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line and do it: 0, or 1 where an answer was wrong; 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
        verb.set_defaults(run=module.main)
    arguments = parser.parse_args(words)
    return int(bool(arguments.run(arguments)))


if __name__ == "__main__":
    sys.exit(main())
