"""What TensorBoard, and a browser, show of a finished run.

The first test takes over 10 s: TensorBoard and a browser are started.
"""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from _helpers.configs import SMALL

from pfl_lightning.cli import main

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--config=configs/fedpac_digits.yaml",
    *SMALL,
    "--trainer.enable_checkpointing=false",
    "--trainer.max_epochs=2",
    "--inspect=true",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with TensorBoard's events."""
    folder = tmp_path_factory.mktemp("runs") / "fedpac"
    main(["fit", *OPTIONS, f"--run_dir={folder}"])
    return folder


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def fetch(url, seconds=60):
    """The answer of a server that is still starting."""
    last = None
    for _ in range(seconds * 5):
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read().decode()
        except OSError as error:
            last = error
            time.sleep(0.2)
    raise TimeoutError(f"{url}: {last}")


@pytest.fixture(scope="module")
def server(run):
    """The address of a TensorBoard on the run."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://localhost:{port}"
        for _ in range(100):  # the first runs are read in the background
            if json.loads(fetch(f"{address}/data/runs")):
                break
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_the_run_is_served(server):
    assert json.loads(fetch(f"{server}/data/runs")) == ["version_0"]
    scalars = json.loads(fetch(f"{server}/data/plugin/scalars/tags"))
    assert {"val_accuracy/mean", "test_accuracy/mean", "train/loss", "bytes/up_weights"} <= set(scalars["version_0"])


def test_the_projector_is_served(server):
    """Its tab draws by WebGL, which a headless browser may not have."""
    url = f"{server}/data/plugin/projector"
    assert json.loads(fetch(f"{url}/runs")) == ["version_0"]
    embeddings = json.loads(fetch(f"{url}/info?run=version_0"))["embeddings"]
    found = [(one["tensorName"], one["tensorShape"][1]) for one in embeddings]
    assert found == [("features:00000", 64), ("features:00001", 64)]


# What the page says, the text inside of shadow roots included.
TEXT_OF_PAGE = """
(() => {
  const read = node => {
    let text = node.nodeType === Node.TEXT_NODE ? node.textContent + "\\n" : "";
    if (["SCRIPT", "STYLE"].includes(node.nodeName)) return "";
    for (const child of node.childNodes) text += read(child);
    return node.shadowRoot ? text + read(node.shadowRoot) : text;
  };
  return read(document.body);
})()
"""


async def look(address, wanted, profile, seconds=90):
    """Open a page in a real browser and wait until it says all that is wanted; returns what it says."""
    import aiohttp

    port = free_port()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,3000"]
    command = [BROWSER, *flags, f"--remote-debugging-port={port}", f"--user-data-dir={profile}", address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/json/version")
        pages = json.loads(await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/json"))
        page = next(entry for entry in pages if entry["type"] == "page")
        connection = page["webSocketDebuggerUrl"]
        async with aiohttp.ClientSession() as session, session.ws_connect(connection, max_msg_size=0) as socket:
            for number in range(seconds * 2):
                parameters = {"expression": TEXT_OF_PAGE, "returnByValue": True}
                await socket.send_json({"id": number, "method": "Runtime.evaluate", "params": parameters})
                answer = await socket.receive_json()
                text = answer.get("result", {}).get("result", {}).get("value") or ""
                if all(word in text for word in wanted):
                    break
                await asyncio.sleep(0.5)
            return text
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize(
    ("tab", "wanted"),
    [
        ("timeseries", ["val_accuracy", "test_accuracy", "train", "bytes", "version_0"]),
        ("images", ["combination_weights", "partition", "accuracy_by_bytes"]),
        pytest.param("histograms", ["clients/test_accuracy"], marks=pytest.mark.slow),
        pytest.param("custom_scalars", ["communication", "combination", "representations"], marks=pytest.mark.slow),
        ("hparams", ["method/lr", "num_clients", "final/last"]),
        pytest.param("text", ["config/text_summary"], marks=pytest.mark.slow),
    ],
)
def test_a_browser_shows_the_run(server, tmp_path, tab, wanted):
    text = asyncio.run(look(f"{server}/#{tab}", wanted, tmp_path))
    missing = [word for word in wanted if word not in text]
    assert not missing, f"the tab {tab} lacks {missing}; it says {text[:3000]!r}"
