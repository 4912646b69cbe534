"""NVIDIA's cuDNN, optional: its graph API from Python by ctypes. Importing this loads nothing.

numbers.py has the API's constants, library.py finds the library and keeps its handles, descriptor.py is the one object that the API is made of,
convolution.py writes a convolution with its epilogue as a graph and lists its engines, launch.py puts a chosen plan on a stream.
The API: https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html
"""
