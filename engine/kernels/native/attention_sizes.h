/* Sizes of the work of rows with few queries. */
#ifndef ATTENTION_SIZES_H
#define ATTENTION_SIZES_H

#define FEW_QUERIES 16 /* per KV head: rows that have more are computed by attention_extend.c */
#define PIECE 512      /* positions of an item, at multiples of it */
#define BLOCK 32       /* positions whose scores are computed together; PIECE is a multiple of it */

#endif
