/* What the kernels of plugins/repeated.py are made of. */
#ifndef INGOT_REPEATED_H
#define INGOT_REPEATED_H
#include "attention/attention.h"
#include "cpu/loop.h"
#include "linear/linear.h"
#include "norm/norm.h"
#include "quantize/quantize.h"

#endif
