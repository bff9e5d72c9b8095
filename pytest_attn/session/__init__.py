"""One run of pytest: options, markers, collection, devices, new processes, and the files it writes."""
