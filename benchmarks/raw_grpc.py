"""The floor: a model's bytes over gRPC and TLS on loopback, down to some clients and up again, and nothing else.

python benchmarks/raw_grpc.py COORDINATOR_FOLDER BYTES ROUNDS CLIENTS [forget]

Prints the seconds of each round, then the largest resident memory of the server and of a client in MB.
The bytes travel in chunks of 5 MB, three at a time, as fast a way as was found. With ``forget`` a client sends one
chunk again and again and keeps none that it received: for models of which the machine cannot hold one for each client.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

CHUNK, AT_ONCE = 5 * 2**20, 3
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def chunks(size: int) -> list[bytes]:
    return [os.urandom(min(CHUNK, size - start)) for start in range(0, size, CHUNK)]


class Mover(grpc.GenericRpcHandler):  # type: ignore[misc]
    """``/pull`` gives the chunk of this number; ``/push`` takes one."""

    def __init__(self, size: int) -> None:
        self._chunks = chunks(size)

    def service(self, call: Any) -> Any:
        if call.method == "/pull":
            return grpc.unary_unary_rpc_method_handler(lambda number, context: self._chunks[int(number)])
        return grpc.unary_unary_rpc_method_handler(lambda chunk, context: b"")


def serve(authority: Path, size: int, clients: int) -> None:
    """Print the port, then serve until stdin is closed."""
    server = grpc.server(ThreadPoolExecutor(clients * AT_ONCE), [Mover(size)], options=UNLIMITED)
    pair = (authority / "server.key").read_bytes(), (authority / "server.crt").read_bytes()
    print(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair])), flush=True)
    server.start()
    sys.stdin.read()


def pull_and_push(authority: Path, size: int, port: int, *, forgets: bool) -> None:
    """For every line on stdin, move all chunks down and up; then answer with a line."""
    credentials = grpc.ssl_channel_credentials((authority / "ca.crt").read_bytes())
    count = -(-size // CHUNK)
    sent = chunks(CHUNK) * count if forgets else chunks(size)
    with (
        grpc.secure_channel(f"127.0.0.1:{port}", credentials, UNLIMITED) as channel,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        pull, push = channel.unary_unary("/pull"), channel.unary_unary("/push")
        print("ready", flush=True)
        for _ in sys.stdin:
            if forgets:
                received = sum(pool.map(lambda number: len(pull(str(number).encode())), range(count)))
            else:
                received = sum(map(len, list(pool.map(lambda number: pull(str(number).encode()), range(count)))))
            assert received == size
            list(pool.map(push, sent))
            print("done", flush=True)


def peak_mb(process: Any) -> int:
    """Largest resident memory of a process so far, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1000


def rounds(folder: str, size: int, count: int, many: int, *options: str) -> tuple[list[float], list[int]]:
    """Seconds of each round, one to warm up left out; and the memory of server and largest client in MB."""

    def started(*role: object) -> Any:
        command = [sys.executable, __file__, folder, str(size), *map(str, role)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    server = started("serve", many)
    port = server.stdout.readline().strip()
    clients = [started("client", port, *options) for _ in range(many)]
    try:
        for client in clients:
            client.stdout.readline()
        seconds = []
        for _ in range(count + 1):
            began = time.perf_counter()
            for client in clients:
                client.stdin.write("go\n")
            for client in clients:
                assert client.stdout.readline() == "done\n"
            seconds.append(time.perf_counter() - began)
        return seconds[1:], [peak_mb(server), max(map(peak_mb, clients))]
    finally:
        for process in (*clients, server):
            process.stdin.close()
            process.wait()


def main() -> None:
    folder, size, *role = sys.argv[1:]
    authority = Path(folder) / "authority"
    match role:
        case ["serve", clients]:
            serve(authority, int(size), int(clients))
        case ["client", port, *options]:
            pull_and_push(authority, int(size), int(port), forgets=options == ["forget"])
        case [count, clients, *options]:
            seconds, peaks = rounds(folder, int(size), int(count), int(clients), *options)
            print(*(f"{second:.3f}" for second in seconds))
            print(*peaks)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
