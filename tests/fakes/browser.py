"""A headless Chromium, driven over a pipe with its DevTools protocol: it listens on no port."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--mute-audio"),
    *("--disable-sync", "--disable-default-apps", "--no-default-browser-check", "--disable-features=Translate"),
)


class Browser:
    """One browser process. `with Browser() as browser: page = browser.open(path)`."""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs, self._out), (self._in, also_theirs) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (theirs, also_theirs)]  # 3 and 4 may be any of the four
        quiet = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in ((1, quiet), (2, quiet), (3, high[0]), (4, high[1]))]
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions, setpgroup=0)
        for fd in (theirs, also_theirs, quiet, *high):
            os.close(fd)
        self._buffer, self._number, self.events = b"", 0, []
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.send("Browser.close")
        for _ in range(50):
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                break
            time.sleep(0.1)
        else:
            os.killpg(self._pid, signal.SIGKILL)  # the group of the one process that was started here
            os.waitpid(self._pid, 0)
        for fd in (self._in, self._out):
            os.close(fd)
        self._profile.cleanup()

    def send(self, method, session=None, timeout=60, **params):
        """Call a method of the protocol and return its result; what happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self, deadline):
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            found = os.read(self._in, 1 << 20)
            if not found:
                raise EOFError("Chromium has ended")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path, width=1280, height=900, dark=False):
        """Open a file in a new tab, and return when all of it is drawn."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.prefer(dark)
        page.send("Page.navigate", url=Path(path).absolute().as_uri())
        page.wait_for("document.documentElement?.dataset.drawn === 'all'")
        return page


class Page:
    """A tab."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target

    def send(self, method, **params):
        """Call a method of the protocol in this tab."""
        return self._browser.send(method, session=self._session, **params)

    def prefer(self, dark):
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def __call__(self, expression):
        """Evaluate JavaScript and return its value; raise RuntimeError where it throws."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait_for(self, expression, seconds=30):
        """Return when an expression holds; raise TimeoutError where it never does."""
        deadline = time.monotonic() + seconds
        while not self(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression}; said so far: {self.said()}")
            time.sleep(0.05)

    def press(self, key, code=None, text=None):
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, **_virtual(key), **more)

    def _mine(self):
        self("1")  # whatever was said before is read now
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def said(self):
        """Return what the console, the log and exceptions have said."""
        words = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event["params"] for event in self._mine() if event["method"] in words]

    def requests(self):
        return [e["params"]["request"]["url"] for e in self._mine() if e["method"] == "Network.requestWillBeSent"]

    def print(self, path):
        Path(path).write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"]))

    def close(self):
        self._browser.send("Target.closeTarget", targetId=self._target)


def _virtual(key):
    number = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, " ": 32}
    return {"windowsVirtualKeyCode": number[key]} if key in number else {}
