// Random elements: the elements are cut into strata of neighbours whose lengths differ by one at most, the
// first ones being longer, and one is drawn from each. The first stratum begins at `start`, and the last one
// wraps around.

#ifndef UNISONO_STRATA
#define UNISONO_STRATA

#include "codec.cuh"

struct Strata {
    u64 key;
    u64 elements;
    u64 count;
    u64 start;
    u64 length;
    u64 longer;

    // The element that is drawn from a stratum.
    __device__ u64 at(u64 number) const {
        const u64 before = number * length + (number < longer ? number : longer);
        const u64 own = length + (number < longer ? 1 : 0);
        const u64 index = start + before + upper_product(random_at(key, number), own);
        return index < elements ? index : index - elements;
    }
};

#endif
