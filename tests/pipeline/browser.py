"""Headless Chromium over the DevTools protocol on a pipe: what the tests of pages need, without a package for it.

https://chromedevtools.github.io/devtools-protocol: JSON messages that end in a zero byte, commands on the browser's
file descriptor 3, answers and events on 4.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--remote-debugging-pipe"]  # fmt: skip
KEYS = {"Enter": (13, "\r"), " ": (32, " "), "ArrowRight": (39, ""), "End": (35, "")}  # key code, text
PATIENCE = 60.0  # seconds until a browser that does not answer is given up


def find_browser() -> str | None:
    """$CHROMIUM, or the first known name on the path."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser process with one tab; `events` are what the tab has said since it was last opened."""

    def __init__(self, executable: str, profile: Path):
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()

        def attach() -> None:
            # by way of high numbers, since 3 or 4 may be an end of one of these very pipes
            first, second = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, answers))
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._log = (profile.parent / "browser.log").open("w")
        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}"], close_fds=False, preexec_fn=attach,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._number, self._rest, self._session = 0, b"", None
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(timeout=20)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._in)
            os.close(self._out)
            self._log.close()

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"the browser {'has ended' if ready else 'does not answer'}; see {self._log.name}")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict:
        """A command's result. Raises RuntimeError with what the browser says is wrong."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + PATIENCE
        while (answer := self._receive(deadline)).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address: str, width: int, height: int = 900) -> None:
        """Go to a page and wait until it and all of its pictures have loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")  # the same page with another #hash would not be loaded anew
        self.events.clear()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + PATIENCE
        while not self._has_loaded(address):
            assert time.monotonic() < deadline, f"{address} does not load"
            time.sleep(0.05)

    def _has_loaded(self, address: str) -> bool:
        try:
            return self.js("location.href + ' ' + document.readyState") == f"{address} complete"
        except RuntimeError:  # between two pages there is none to ask
            return False

    def js(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page. Raises RuntimeError where it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which must be the one seen there (or hold it)."""
        chosen = json.dumps(selector)
        x, y, hit = self.js(
            f"""(() => {{
                const element = document.querySelector({chosen});
                element.scrollIntoView({{block: "center", inline: "center", behavior: "instant"}});
                const widest = (a, b) => b.width > a.width ? b : a;  // of the lines that it is broken into
                const box = [...element.getClientRects()].reduce(widest);
                const x = box.x + box.width / 2, y = box.y + box.height / 2;
                return [x, y, element.contains(document.elementFromPoint(x, y))];
            }})()"""
        )
        assert hit, f"{selector} is hidden or covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        known = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **known, **down)
        self.call("Input.dispatchKeyEvent", **known, type="keyUp")

    def problems(self) -> list[dict]:
        """Errors and warnings of the console, and what was thrown and not caught, since `open`."""
        bad = {"Runtime.exceptionThrown": lambda said: True,
               "Runtime.consoleAPICalled": lambda said: said["type"] in ("error", "warning", "assert"),
               "Log.entryAdded": lambda said: said["entry"]["level"] in ("error", "warning")}  # fmt: skip
        return [event for event in self.events if bad.get(event["method"], lambda said: False)(event["params"])]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, since `open`."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))
