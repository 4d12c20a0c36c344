"""Other products that do part of what this one does, measured beside it.

Each is installed on demand in a virtual environment of its own below the cache directory, and runs in
processes of its own. One that cannot be installed or run is reported as not available, with the reason.
"""
