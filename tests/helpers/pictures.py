"""The texts of a picture, read out of its SVG."""

from xml.etree import ElementTree


def said(picture: str) -> list[str]:
    """The text of each mark under the pointer."""
    return [title.text or "" for title in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
