pytest_plugins = ["pytester"]

try:  # once, here: in-process pytester runs cannot import torch's C extensions a second time
    import numpy  # noqa: F401
    import torch  # noqa: F401
except ImportError:
    pass
