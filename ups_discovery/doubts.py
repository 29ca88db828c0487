"""Why an identified equation may not be stated, in words."""

HALVES = "its terms differ between halves of the data"
OTHERS = "other terms explain the data as well"
UNCLEAR = "it leaves too much of what happens from one frame to the next unexplained"
ILL_POSED = "in it the shortest waves grow without bound"
