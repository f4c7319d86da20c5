"""What a picture shows, read out of its SVG."""

from xml.etree import ElementTree


def said(picture: str) -> list[str]:
    """What each mark says under the pointer."""
    return [title.text or "" for title in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
