"""The retrieval service: an index builder and an HTTP server that speaks the published ``/retrieve`` wire format.

It imports nothing else of this project and is reached through HTTP only. Importing this package loads nothing heavy.
"""
