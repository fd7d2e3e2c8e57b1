"""A server for tests: a real uvicorn on a free loopback port, in a thread of this process."""

import contextlib
import socket
import threading
import time

import uvicorn


@contextlib.contextmanager
def live(app):
    """The address of this app while it is served: http://127.0.0.1:port"""
    with socket.create_server(("127.0.0.1", 0)) as door:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield "http://{}:{}".format(*door.getsockname())
        finally:
            server.should_exit = True
            thread.join()
