/* Uses the tile instructions of "amx.h" as the processor does not allow; how: in which way. 0 is allowed. */
#include "amx.h"

__attribute__((visibility("default"))) void use(int how) {
    amx_config shape = {.palette = 1, .row_bytes = {64, 32, 64}, .rows = {16, 16, 8}};
    static uint8_t memory[1024];
    if (how == 1) shape.palette = 2;
    if (how == 2) shape.rows[0] = 17;
    if (how == 3) shape.row_bytes[9] = 64, shape.rows[9] = 1;
    if (how == 4) shape.reserved[3] = 1;
    if (how == 5) shape.rows[2] = 16;
    if (how == 6) shape.rows[1] = 8;
    if (how == 7) shape.row_bytes[2] = 32;
    if (how == 8) shape.rows[2] = 0;
    if (how != 9) _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_loadd(1, memory, 32);
    _tile_loadd(how == 10 ? 3 : 2, memory, 64);
    _tile_dpbssd(0, 1, how == 11 ? 1 : 2);
    if (how == 12) _tile_release();
    _tile_stored(0, memory, 64);
}
