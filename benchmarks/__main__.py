"""`python -m benchmarks VERB`: one verb for each way to measure."""

import argparse

from benchmarks import bytes as bytes_moved

VERBS = {"bytes": bytes_moved}


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
        verb.set_defaults(run=module.main)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
