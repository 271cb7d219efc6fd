#include "portable.cuh"
