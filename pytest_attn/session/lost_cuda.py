"""A CUDA context that a test has lost: the tests after it are skipped with the reason, and are not called wrong."""

import sys


class CudaContext:
    """The CUDA context of this process. lost_because: which test ended it, None while none has."""

    def __init__(self) -> None:
        self.lost_because: str | None = None

    def look_after(self, nodeid: str) -> None:
        """Find out whether a test that failed left the context unusable, as an illegal memory access does."""
        torch = sys.modules.get("torch")
        if self.lost_because or torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            said = str(error).splitlines()[0]
            self.lost_because = f"{nodeid} corrupted this process's CUDA context ({said}); run the other tests without it"
