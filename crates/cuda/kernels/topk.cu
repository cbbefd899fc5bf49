// topk: the elements of largest magnitude, as the host finds and packs them.
//
// A *magnitude* is the bits of a float without its sign. What is taken is everything above some magnitude, and
// the first few of exactly that magnitude: a *cut*. The host's rules (crates/codec/src/topk.rs) say which:
//
// 1. `topk_begin` gathers a sample of the elements, and finds the cut that takes 256 of them.
// 2. `topk_mark` goes over all elements once: it adds the gradient to the residual, and *stages* index and value of
//    each element at the cut or above. It does so by *tiles* of 4096 elements, which take the places that are
//    free next: within a tile elements are in order, tiles are not.
// 3. If neither too few nor too many are staged, they are what is sent. If not, or without a sample, the cut that
//    takes exactly as many as wanted is found digit by digit (`topk_count` three times) among what is staged
//    where that is enough, and else among all elements; and what it takes is counted by tiles (`topk_tally`).
//    No call waits for this decision: these kernels are always submitted, and end at once where they are not
//    needed.
// 4. `topk_order` puts indices and values in order, by spans of tiles; what is before a span is the sum of what
//    the others have. Only there do ties have to be told apart.
// 5. Gaps between indices are packed in groups of 128, each with the width that makes it shortest
//    (`topk_widths`), of which the directory tells; where each group begins is the sum of the lengths before it
//    (`topk_pack`). `topk_finish` puts count, directory, groups and values together.
//
// To decode, some blocks of `topk_directory` add up how long groups are, while others write zeros. Then each group
// is unpacked by a warp (`topk_unpack`), and the values go to their places (`topk_scatter`).

#include "topk_encode.cuh"
#include "topk_decode.cuh"
