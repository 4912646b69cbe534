"""A TensorRT build function that runs on the CPU; only its import was changed. Usage: python examples/build_engine.py MODEL.onnx ENGINE"""

import sys

import whet.trt as trt

TRT_LOGGER = trt.Logger(trt.Logger.WARNING)


def build_engine(onnx_file, fp16=False, int8=False, calibrator=None, workspace=1 << 30):
    builder = trt.Builder(TRT_LOGGER)
    config = builder.create_builder_config()
    config.max_workspace_size = workspace
    if fp16 and builder.platform_has_fast_fp16:
        config.set_flag(trt.BuilderFlag.FP16)
    if int8 and builder.platform_has_fast_int8:
        config.set_flag(trt.BuilderFlag.INT8)
        if calibrator is not None:
            config.int8_calibrator = calibrator
    if builder.platform_has_fast_sparsity:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    parser = trt.OnnxParser(builder.create_network(), TRT_LOGGER)
    with open(onnx_file, "rb") as f:
        if not parser.parse(f.read()):
            for i in range(parser.num_errors):
                print(parser.get_error(i))
            return None
    return builder.build_serialized_network(parser.network, config)


if __name__ == "__main__":
    engine = build_engine(sys.argv[1])
    if engine is None:
        sys.exit(1)
    with open(sys.argv[2], "wb") as f:
        f.write(engine)
