/* Sizes of the work of rows with few queries. */
#ifndef ATTENTION_SIZES_H
#define ATTENTION_SIZES_H

#define FEW_QUERIES 16 /* per KV head; attention_extend.c computes rows that have more */
#define PIECE 512      /* positions of an item, at multiples of it */
#define BLOCK 32       /* positions whose scores are computed together; PIECE is a multiple of it */

#endif
