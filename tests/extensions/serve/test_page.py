"""The page at / in a browser: both texts, their rounds, and the probabilities of their tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_ssp import load
from llama_ssp.extensions.serve import http
from llama_ssp.extensions.serve.records import ServeConfig
from tests.extensions.serve import browser
from tests.extensions.serve.server import PROMPT, Server, serving

SETTINGS = {"max_tokens": 40, "temperature": 0.7, "seed": 3}
MOST_LINES = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("secret\n")
    with serving(load("tiny", "tiny-draft"), task=ServeConfig(port=0, api_key_file=str(key))) as server:
        yield server


@pytest.mark.seconds
@pytest.mark.skipif(not browser.PROGRAM, reason="Chromium is not installed for this user")
@pytest.mark.parametrize("width", [400, 1280])
def test_both_texts_come_round_by_round(server: Server, tmp_path: Path, width: int) -> None:
    wanted = server.ask("/v1/completions", {"prompt": PROMPT, **SETTINGS}, key="secret")[1]["choices"][0]["text"]
    with browser.browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{server.port}/", width=width)
        page.wait_for("document.readyState === 'complete' && typeof go === 'function'")
        for name, value in SETTINGS.items():
            page.evaluate(f"document.getElementById('{name}').value = {value}")
        page.evaluate("document.getElementById('ask').requestSubmit()")
        page.wait_for("document.querySelector('#plain .failed') && document.body.dataset.done")
        assert "the key is missing or wrong" in page.evaluate("document.querySelector('#plain .speed').textContent")
        page.errors.clear()  # the browser notes the refusal itself
        page.evaluate(
            "document.getElementById('key').value = 'secret'; delete document.body.dataset.done;"
            "document.getElementById('ask').requestSubmit()"
        )
        page.wait_for("document.body.dataset.done")
        texts = "[...document.querySelectorAll('#{0} .token')].map(one => one.textContent)"
        drafted, plain = (page.evaluate(texts.format(name)) for name in ("speculative", "plain"))
        assert "".join(drafted) == wanted
        assert (len(drafted), len(plain)) == (40, 40)
        assert page.evaluate("document.querySelectorAll('#speculative .token.drafted').length") > 5
        assert page.evaluate("document.querySelectorAll('#speculative s.rejected').length") > 0
        assert page.evaluate("document.querySelectorAll('#plain :is(.token.drafted, s)').length") == 0
        rounds = [
            page.evaluate(f"document.querySelectorAll('#{name} .rounds i').length") for name in ("speculative", "plain")
        ]
        assert rounds[0] < rounds[1] == 40
        assert "tokens/s" in page.evaluate("document.querySelector('#speculative .speed').textContent")
        copied = "getSelection().selectAllChildren(document.querySelector('#speculative .text')); getSelection() + ''"
        assert page.evaluate(copied) == PROMPT + wanted
        struck = (
            "[...document.querySelectorAll('#speculative s.rejected')].map(one => getComputedStyle(one, '::before')"
        )
        shown = page.evaluate(struck + ".content)")
        assert all(len(one) > 2 and "\n" not in one for one in shown)
        page.evaluate("document.querySelector('#speculative .text').focus()")
        page.press("ArrowRight")
        page.press("ArrowRight")
        shown = page.evaluate("document.getElementById('top').hidden ? '' : document.getElementById('top').textContent")
        assert shown.count("%") in {5, 6}
        page.wait_for("document.documentElement.scrollWidth <= window.innerWidth")
        assert not page.errors


@pytest.mark.seconds
@pytest.mark.skipif(not browser.PROGRAM, reason="Chromium is not installed for this user")
def test_the_page_takes_long_seeds_and_any_temperature_and_says_that_a_server_stands_still(
    server: Server, tmp_path: Path
) -> None:
    body: dict[str, object] = {"prompt": "x", "seed": 2**53 + 1, "max_tokens": 24, "temperature": 0.85}
    wanted = {
        name: server.ask("/v1/completions", body | more, key="secret")[1]["choices"][0]["text"]
        for name, more in (("speculative", {}), ("plain", {"speculative": False}))
    }
    with browser.browser(tmp_path) as page:
        asked = f"prompt=x&seed=00{2**53 + 1}&max_tokens=24&temperature=0.85"
        page.open(f"http://127.0.0.1:{server.port}/?{asked}", width=900)
        page.wait_for("document.readyState === 'complete' && document.body.dataset.done")
        assert page.evaluate("document.getElementById('ask').checkValidity()")
        page.evaluate(
            "delete document.body.dataset.done; document.getElementById('key').value = 'secret';"
            "const asked = fetch; window.fetch = async (...given) => {"
            " const answer = await asked(...given);"
            " if (given[1]?.method === 'POST') await new Promise((done) => setTimeout(done, 7000));"
            " return answer; }; document.getElementById('ask').requestSubmit()"
        )
        page.wait_for("document.querySelector('#plain .speed').textContent.includes('no token for')")
        page.wait_for("document.body.dataset.done")
        for name, text in wanted.items():
            found = page.evaluate(f"[...document.querySelectorAll('#{name} .token')].map(one => one.textContent)")
            assert "".join(found) == text


def test_the_page_needs_no_key_loads_nothing_from_elsewhere_and_is_short(server: Server) -> None:
    connection = server.connect()
    for name in ("", "page.css", "page.js"):
        connection.request("GET", f"/{name}")
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "//" not in text.replace("// ", ""), "an address"
    connection.close()
    files = [Path(http.__file__).with_name("web") / name for name in http._PAGE]
    assert sum(file.read_text().count("\n") for file in files) <= MOST_LINES


@pytest.mark.seconds
def test_the_page_can_be_left_out() -> None:
    with serving(load("tiny"), task=ServeConfig(port=0, page=False)) as server:
        assert [server.ask(f"/{name}")[0] for name in ("", "page.js")] == [404, 404]
