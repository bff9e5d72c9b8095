"""Steady: what a kernel costs once a server runs, when nothing compiles, grows or waits; and runs that only compile."""
