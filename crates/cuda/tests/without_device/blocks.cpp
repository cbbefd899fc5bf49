// Kernels whose threads work together, compiled for the host: what stands in for the device, and then the
// source of one family, KERNELS.

#include "block.h"

#include KERNELS
