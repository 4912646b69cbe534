// What Args of conv.cu and conv_tf32.cu say of a layer behind its addresses, in the order in which the host's layer_numbers packs them.
    int res_pitch, out_pitch;  // elements
    int m, n;                  // pixels, output channels
    int steps, csteps;         // K steps in all, and of one filter tap
    int taps_w;                // filter width
    int pixels, width;         // output pixels of an image, output width
    int stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
    int tiles, tiles_n;
    int has_residual;          // 1: added before the activation, 2: after it
    Act act;
