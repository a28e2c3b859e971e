"""The Triton backend. Importing this package imports neither torch nor triton.

`kernels.cuda.ops.CudaOps` is the implementation of `kernels.ops.Ops`.
"""
