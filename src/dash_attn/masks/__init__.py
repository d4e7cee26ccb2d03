"""Which query attends to which key. rules.py: masks that a few numbers describe. The others: any boolean matrix (docs/masks.md)."""

from .block_mask import from_block_mask as from_block_mask
from .boolean_mask import BooleanMask as BooleanMask
from .boolean_mask import PatternPerHead as PatternPerHead
from .boolean_mask import TilePattern as TilePattern
from .encoding import MASK_FORMS as MASK_FORMS
from .encoding import parse_mask as parse_mask
from .rules import EMPTY as EMPTY
from .rules import FULL as FULL
from .rules import PARTIAL as PARTIAL
from .rules import Causal as Causal
from .rules import Documents as Documents
from .rules import Full as Full
from .rules import IntervalMask as IntervalMask
from .rules import Mask as Mask
from .rules import Prefix as Prefix
from .rules import TileMap as TileMap
from .rules import Window as Window
from .rules import check_mask as check_mask
from .rules import is_whole as is_whole
