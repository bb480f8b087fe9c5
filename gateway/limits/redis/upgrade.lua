-- Upgrade what gateways of commit 3c1fad8 have counted. They stored the costs of days and months in units of the currency (dc, odc, mc, omc).
-- They have counted everything, so nothing must be added to their counts (restore.lua).
--
-- ARGV: the cursor of SCAN, at first 0. Returns the next one, 0 at the end, also for a user who must not run SCAN.
local found = redis.pcall('SCAN', ARGV[1], 'MATCH', 'vllm-gateway:*', 'COUNT', 1000)
if found.err then return '0' end
for _, key in ipairs(found[2]) do
  for _, period in ipairs(redis.call('TYPE', key).ok == 'hash' and {'d', 'od', 'm', 'om'} or {}) do
    local cost = redis.call('HGET', key, period .. 'c')
    if cost then
      redis.call('HSET', key, period .. 'n', string.format('%.0f', tonumber(cost) * 1000000000), 'e', 'all')
      redis.call('HDEL', key, period .. 'c')
    end
  end
end
return found[1]
