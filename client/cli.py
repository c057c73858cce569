"""flwr-client: not in this release."""

import sys


def main() -> None:
    """Say what there is instead, and exit with 2."""
    print("flwr-client: federations over the network are not in this release. Use flwr-sim.", file=sys.stderr)
    sys.exit(2)
