"""The process that ``flwr-sim run --web`` begins: python -m server.reporting.live.main DESCRIPTOR FOLDER."""

import os
import socket
import sys
import threading
from pathlib import Path

from server.reporting.live.service import ViewServer, Watch
from server.reporting.live.snapshot import Where


def main() -> None:
    """The process: serve until standard input ends, which it also does when the run is killed."""
    os.nice(10)  # the run comes first
    descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
    token = sys.stdin.readline().strip()
    server = ViewServer(Watch(Where("flwr-sim", folder)), token)

    def end_with_the_run() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_the_run, daemon=True).start()
    server.until_told(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
