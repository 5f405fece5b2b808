"""A headless Chromium, driven over its DevTools protocol; for tests of the page."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium")
WHY_NOT = "chromium is not installed (apt-get install chromium)"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-port=0", "--force-device-scale-factor=1"),
)
DEADLINE = 120.0
"""Seconds after which something that should appear has not."""
QUIET = ("data:", "blob:")
"""Addresses that are no request."""
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27}


class Browser:
    """One tab. `requests`: all addresses that it asked for. `errors`: what went wrong in its scripts, what
    the content security policy has refused, and dialogs."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=DEADLINE))
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, about: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(QUIET):
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if about["type"] == "error":
                self.errors.append(str(about["args"]))
            case "Page.javascriptDialogOpening":
                self.errors.append(f"dialog: {about['message']}")
            case _:
                pass

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page has begun."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.documentElement.dataset.ready")

    def go(self, fragment: str) -> None:
        """Change the fragment of the address."""
        self.run(f"location.hash = {json.dumps(fragment)}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; of a promise what it gives."""
        how = {"returnByValue": True, "awaitPromise": True, "allowUnsafeEvalBlockedByCSP": False}
        found = self.send("Runtime.evaluate", expression=script, **how)
        if "exceptionDetails" in found:
            raise AssertionError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = DEADLINE) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # a page that is being left
                if value := self.run(f"(found => found instanceof Node || found)({script})"):
                    return value
            time.sleep(0.1)
        raise AssertionError(
            f"not in {seconds:g} s: {script}; the page says: {self.text()[:3000]}; {self.errors}"
        )

    def text(self, selector: str = "body") -> str:
        """The text of an element as it is seen."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def sees(self, text: str, selector: str = "body") -> None:
        """Wait until a text is in an element."""
        self.wait(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")

    def click(self, selector: str, *, x: float = 0.5, y: float = 0.5) -> None:
        """Click into an element, at these shares of its width and height."""
        script = f"document.querySelector({json.dumps(selector)})"
        self.wait(script + "?.checkVisibility()")
        self.run(script + ".scrollIntoView({block: 'center'})")
        box = self.run(
            f"(() => {{const b = {script}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]}})()"
        )
        place = {"x": box[0] + x * box[2], "y": box[1] + y * box[3], "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **place)

    def key(self, key: str) -> None:
        """Press a key."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {} if key in KEYS and key != "Enter" else {"text": "\r" if key == "Enter" else key}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.send("Input.insertText", text=text)

    def size(self, width: int, height: int) -> None:
        """Change the size of the window."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile; what it saves goes to `folder`."""
    assert PROGRAM is not None
    profile = folder / "profile"
    command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            noted = profile / "DevToolsActivePort"
            deadline = time.monotonic() + DEADLINE
            while not (noted.is_file() and "\n" in noted.read_text()):
                assert process.poll() is None, "chromium has ended"
                assert time.monotonic() < deadline, f"chromium has not begun in {DEADLINE:g} s"
                time.sleep(0.1)
            port, path = noted.read_text().split("\n")[:2]
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as whole:
                whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(whole.recv(timeout=DEADLINE))["result"]["targetInfos"]
                (tab,) = [one["targetId"] for one in targets if one["type"] == "page"]
                allowed = {"behavior": "allow", "downloadPath": str(folder)}
                whole.send(json.dumps({"id": 2, "method": "Browser.setDownloadBehavior", "params": allowed}))
                whole.recv(timeout=DEADLINE)
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{tab}", max_size=None, proxy=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait(DEADLINE)
