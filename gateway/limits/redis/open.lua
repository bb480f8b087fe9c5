-- Run each kind of command that the other scripts run. So a store that rejects any of these commands is not used.
--
-- KEYS: the hash of the store itself; a hash and a sorted set for this trial. A full store rejects the first write. After another
-- write of the same script it would accept it.
-- Returns a text of numbers: the time, and the time since which this store has counts, both in microseconds. A store that has lost its
-- counts has lost the latter too. It lasts as long as the longest count, from its last use on.
local store, hash, set = KEYS[1], KEYS[2], KEYS[3]
local now = string.format('%.0f', tonumber(clock[1]) * 1000000 + tonumber(clock[2]))
redis.call('HSET', hash, 'trial', now)
redis.call('HDEL', hash, 'trial')
redis.call('ZADD', set, now, 'trial')
redis.call('EXPIRE', set, 60)
redis.call('ZREMRANGEBYSCORE', set, '-inf', '-inf')
redis.call('ZREM', set, 'trial')
redis.call('ZPOPMIN', set)
redis.call('DEL', set)
local since = redis.call('HMGET', store, 'since')[1]
if not since then
  since = now
  redis.call('HSET', store, 'since', since)
end
redis.call('EXPIRE', store, 70 * 86400)
return now .. ' ' .. since
