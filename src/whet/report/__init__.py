"""Views for people: the page that a search leaves, and its progress in a terminal. Pages are one file each and ask the network for nothing."""

from whet.report.search_page import search_page

__all__ = ["search_page"]
