"""Web search APIs as a backend. ``retriever`` uses ``api`` and ``pages``, and these ``transport`` and ``state``."""
