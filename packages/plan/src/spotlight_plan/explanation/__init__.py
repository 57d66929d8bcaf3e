"""Why a plan is what it is: the levers that lead to it, and the assumptions that move it."""
