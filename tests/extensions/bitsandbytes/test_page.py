"""The page of bitsandbytes says what its messages say."""

from llama_ssp.extensions.bitsandbytes.records import BITSANDBYTES
from tests.helpers.repository import ROOT


def test_the_package_is_installed_by_the_command_that_its_message_says() -> None:
    page = (ROOT / "llama_ssp/extensions/bitsandbytes/page.md").read_text()
    assert [line for line in page.splitlines() if "pip install" in line] == [BITSANDBYTES.install]
