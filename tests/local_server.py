"""A server on 127.0.0.1 whose behaviour a test plans."""

import contextlib
import http.server
import threading
from collections.abc import Iterator


class PlannedHandler(http.server.BaseHTTPRequestHandler):
    """Takes the next behaviour of `server.plan` for each request, "ok" where there is none, a number for an
    error; notes its Range. `answer`: the test's own."""

    def do_GET(self):
        server = self.server
        plan = server.plan.pop(0) if server.plan else "ok"
        server.ranges.append(self.headers.get("Range"))
        with contextlib.suppress(OSError):  # the client has gone
            if isinstance(plan, int):
                self.send_error(plan)
            else:
                self.answer(plan)

    def drip(self, first=b""):
        """A byte every 20 ms until the client or the test ends it."""
        self.wfile.write(first)
        while not self.server.is_over.wait(0.02):
            self.wfile.write(b"x")

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(handler: type[PlannedHandler], **facts) -> Iterator[http.server.ThreadingHTTPServer]:
    """The running server, with `facts` for its handler."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.plan, server.ranges, server.is_over = [], [], threading.Event()
        server.url, server.daemon_threads = f"http://127.0.0.1:{server.server_port}/api/1", True
        vars(server).update(facts)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()
