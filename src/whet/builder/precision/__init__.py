"""Selection of storage types: permissions, calibration, INT8, FP8 and 16-bit floats by time and accuracy."""
