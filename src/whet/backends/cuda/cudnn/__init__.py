"""NVIDIA's cuDNN, optional: its graph API through ctypes. Importing this loads no library.

numbers.py has the API's constants, library.py finds the library and manages its handles, descriptor.py wraps the API's only object type,
convolution.py builds the graph of a convolution with its epilogue and lists its engines, launch.py enqueues a plan on a stream.
The API: https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html
"""
