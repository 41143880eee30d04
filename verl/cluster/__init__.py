"""Where workers run: in this process (``local``) or on Ray (``ray``, the only module that imports it)."""
