"""Every touch of something private to torch, with the version it was seen in (2.13 unless said).

Nothing is patched; what is imported here may move, and then this is the one package to mend. Its
modules alone may touch private names, some of which torch's stubs do not know.
"""
