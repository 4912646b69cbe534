"""NVIDIA GPUs without torch: driver, NVRTC, memory, streams, launches and graphs, NVML. Importing this loads none of them."""
