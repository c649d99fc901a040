/* Runs one launch of a kernel for another machine under its emulator; appended to a translation unit of kernels, after
 * a table `kernels` of their names and functions.
 *
 * Standard input: name of the kernel, a newline; then int32: num_workers, the four counts of ingot_step, the number of
 * segments and of arguments; int64 size and alignment (its address modulo 64) of each segment, the first seven
 * being the arrays of ingot_step; int64 segment and offset of each argument, segment -1 being null; the segments' bytes.
 * Standard output: the segments' bytes after the launch. */
#include <stdio.h>
#include <stdlib.h>

static void *get(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(3);
    return to;
}

int main(void) {
    char name[512];
    int32_t head[7];
    if (!fgets(name, sizeof name, stdin)) return 2;
    name[strcspn(name, "\n")] = 0;
    get(head, sizeof head);
    int num_segments = head[5], num_args = head[6];
    int64_t (*segments)[2] = get(malloc(sizeof(int64_t[2]) * (size_t)num_segments), 16 * (size_t)num_segments);
    int64_t (*places)[2] = get(malloc(sizeof(int64_t[2]) * (size_t)(num_args + 1)), 16 * (size_t)num_args);
    char **memory = malloc(sizeof(char *) * (size_t)num_segments);
    for (int i = 0; i < num_segments; i++) {
        size_t size = (size_t)segments[i][0];
        memory[i] = (char *)aligned_alloc(64, (size + 255) / 64 * 64) + segments[i][1];
        get(memory[i], size);
    }
    void **args = malloc(sizeof(void *) * (size_t)(num_args + 1));
    for (int i = 0; i < num_args; i++) args[i] = places[i][0] < 0 ? NULL : memory[places[i][0]] + places[i][1];
    const int32_t *arrays[7];
    for (int i = 0; i < 7; i++) arrays[i] = (const int32_t *)memory[i];
    ingot_step step = {head[1], head[2], head[3], head[4], arrays[0], arrays[1], arrays[2], arrays[3],
                       arrays[4], arrays[5], arrays[6], NULL};
    for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) {
        if (strcmp(kernels[k].name, name)) continue;
        for (int worker = head[0] - 1; worker >= 0; worker--) kernels[k].function(&step, args, worker, head[0]);
        for (int i = 0; i < num_segments; i++) fwrite(memory[i], 1, (size_t)segments[i][0], stdout);
        return 0;
    }
    return 4;
}
